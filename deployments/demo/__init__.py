"""The demo behind ``make demo``: one real model, one real dataset, one probe, one picture."""
