"""Linear probes: at which layer can a label be read off the activations?

:func:`probe_by_layer` fits one logistic regression per hook site and scores it on groups of rows
that it never saw. Beside every score stand two controls: training labels that were shuffled must
score at chance, or the split leaks; another label that is known to be easy should score high, or
the rows are misaligned. :func:`plot_probe_report` draws it; :func:`save_probe` keeps one probe
with a reference to the exact dataset that it was fitted on.

Fitting needs scikit-learn and drawing needs matplotlib (``pip install '.[probe]'`` in a checkout);
loading a saved probe and predicting with it needs neither.
"""

from wllm_ray.probe.fitting import ProbeReport, SiteResult, probe_by_layer
from wllm_ray.probe.picture import plot_probe_report
from wllm_ray.probe.saved import Probe, load_probe, save_probe
from wllm_ray.probe.scores import Score

__all__ = [
    "Probe",
    "ProbeReport",
    "Score",
    "SiteResult",
    "load_probe",
    "plot_probe_report",
    "probe_by_layer",
    "save_probe",
]
