"""What is written and read: the storage root, the documents, the shards.

The bytes are defined in FORMAT.md beside this file. Writing is :mod:`.writer`, reading is
:mod:`.reader`; both see the storage root only through :class:`.store.Store`.
"""
