"""`evensong bench`: one file a benchmark, and the parts that they share."""
