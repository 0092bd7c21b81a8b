"""A committed dataset in the formats of other tools; see README.md beside this file.

`parquet` and `hf` need nothing more than the bare install, `safetensors` and `saelens` the `export`
extra: ``pip install '.[export]'`` in a checkout.
"""

from wllm_ray.export.run import FORMATS, export_dataset

__all__ = ["FORMATS", "export_dataset"]
