"""Where models come from: folders, GGUF files, a published package."""
