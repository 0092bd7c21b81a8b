"""What is written and read; FORMAT.md beside this file defines the bytes.

``tools > writing > reading > format > stores``: each imports only from those behind it.
:func:`.reading.reader.load_dataset` opens a dataset, :mod:`.writing.writer` makes one, and
:mod:`.stores.store` is where it lies.
"""
