"""The Ray shells: a Serve application and the tasks that write datasets. No logic of their own."""
