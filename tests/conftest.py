"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says how busy the machine is, and nothing of the code.
settings.register_profile("wllm_ray", deadline=None)
settings.load_profile("wllm_ray")
