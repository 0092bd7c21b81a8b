"""From a storage root to arrays: opened, checked, picked, verified."""
