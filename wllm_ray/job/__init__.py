"""One job, whoever runs it: the ingress, the client, the command line or a Ray job driver.

:mod:`.run` takes it from spec to manifest over callables; :mod:`.source` makes one of rows that are
read as often as needed; :mod:`.progress` and :mod:`.summary` tell how far it is and what came of
it.
"""
