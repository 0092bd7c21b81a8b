"""The bytes of a dataset as FORMAT.md defines them; touches no storage root."""
