"""Settings: one frozen dataclass a section, made by EngineArgs and resolve()."""
