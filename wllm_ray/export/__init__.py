"""A committed dataset in the formats of other tools; see README.md beside this file.

Parquet needs nothing more than the bare install; the others need
``pip install 'wllm-ray[export]'``.
"""

from wllm_ray.export.run import FORMATS, export_dataset

__all__ = ["FORMATS", "export_dataset"]
