"""From captured chunks to a committed dataset: spec, shards with receipts, manifest."""
