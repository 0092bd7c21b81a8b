"""The HTTP surface: FastAPI routes over an :class:`~wllm_ray.extraction.ExtractionService`.

Needs FastAPI, which the ``serve`` extra brings. Knows neither Ray nor an engine.
"""
