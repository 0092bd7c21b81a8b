"""``build_app``: what ``serve run`` calls to make the application from its arguments."""

# No `from __future__ import annotations` here: Serve reads the builder's annotation at run time to
# validate its arguments, and would take a postponed one for a plain dictionary.

from pathlib import Path

import ray
from ray import serve
from ray.serve import Application

from deployments.activation import ActivationReplica, EngineLoader, load_vllm_engine
from deployments.args import AppArgs
from deployments.backend import REPLICA_DEPLOYMENT
from deployments.ingress import Ingress
from wllm_ray.capture.model_files import resolve_model

__all__ = ["bind_app", "build_app"]


def _gpus(args: AppArgs) -> int:
    """GPUs per replica; ``serve run module:builder`` calls the builder before it joins Ray."""
    if args.num_gpus != "auto":
        return args.num_gpus
    if ray.is_initialized():
        return int(ray.cluster_resources().get("GPU", 0) >= 1)
    return int(any(Path("/dev").glob("nvidia[0-9]*")))


def build_app(args: AppArgs) -> Application:
    """Bind the ingress to the activation replicas.

    Autoscaling, queue bounds and time-outs are set here to defaults that work on one machine;
    ``serve_config.yaml`` overrides them by deployment name.

    Args:
        args: From ``args:`` in the YAML file or ``key=value`` on the command line.
    """
    return bind_app(args, load_vllm_engine)


def bind_app(args: AppArgs, load_engine: EngineLoader) -> Application:
    """As :func:`build_app`, with any engine."""
    # Resolved once, so that every replica of this application runs the same commit.
    identity = resolve_model(args.model, args.revision)
    replicas = serve.deployment(
        ActivationReplica,
        name=REPLICA_DEPLOYMENT,
        max_ongoing_requests=16,
        autoscaling_config={"min_replicas": 1, "max_replicas": 1, "target_ongoing_requests": 8},
        health_check_period_s=10,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=180,
        max_constructor_retry_count=3,
        ray_actor_options={
            "num_gpus": _gpus(args),
            "num_cpus": args.num_cpus,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(args.threads or 1)}},
        },
    )
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        max_ongoing_requests=256,
        graceful_shutdown_timeout_s=60,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(args, identity, replicas.bind(args, identity, load_engine))
