"""Call an application from Python: datasets come back, ready to use.

::

    with WLLMClient("http://127.0.0.1:8000") as client:
        dataset = client.extract_activations("my-model", ["a prompt", "another"], layers=[12])

What ``persist=False`` returns is built on this machine, in memory, by the same steps that a server
or the command line uses to write a dataset, so its content digest is the same.
"""

from wllm_ray.client.aio import AsyncWLLMClient
from wllm_ray.client.blocking import WLLMClient

__all__ = ["AsyncWLLMClient", "WLLMClient"]
