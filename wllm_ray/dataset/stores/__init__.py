"""Storage roots behind few primitives: a folder, an object store, memory."""
