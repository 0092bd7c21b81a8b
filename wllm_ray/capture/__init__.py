"""What is read from a model: the engines, and how they find and prove what they read."""
