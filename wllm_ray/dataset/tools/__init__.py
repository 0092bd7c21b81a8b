"""What is done with datasets afterwards: inspect, clean up, give up, merge."""
