# syntax=docker/dockerfile:1.7
# Flotilla and Ray in one image; docs/image.md says how to build and check it.
#   docker build --target cpu  -t flotilla:0.1.0 .
#   docker build --target cuda -t flotilla:0.1.0-cuda .
# Give the base images by digest (--build-arg PYTHON_IMAGE=python@sha256:...) for builds that repeat exactly.
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04

# -- the wheel ---------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /source
RUN --mount=type=cache,target=/root/.cache/pip pip install --disable-pip-version-check build==1.3.0
COPY . .
RUN python -m build --wheel --outdir /wheel

# -- dependencies, without and with CUDA -------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS install-cpu
COPY image/constraints.txt /tmp/constraints.txt
RUN python -m venv /opt/flotilla
ENV PATH=/opt/flotilla/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
# The build of torch without CUDA is 2 GB smaller and lies in an index of its own.
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' /tmp/constraints.txt)"
COPY --from=wheel /wheel /tmp/wheel
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint /tmp/constraints.txt "$(ls /tmp/wheel/*.whl)[otel]" && python -m compileall -q /opt/flotilla

FROM ${CUDA_IMAGE} AS install-cuda
COPY image/constraints.txt /tmp/constraints.txt
RUN apt-get update && apt-get install -y --no-install-recommends python3.12 python3.12-venv && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/flotilla
ENV PATH=/opt/flotilla/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
COPY --from=wheel /wheel /tmp/wheel
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint /tmp/constraints.txt "$(ls /tmp/wheel/*.whl)[otel,gpu]" && python -m compileall -q /opt/flotilla

# -- images ------------------------------------------------------------------------------------------
FROM ${CUDA_IMAGE} AS cuda
# FlashInfer and Triton build their kernels when they are first used, hence compilers and Python's headers.
# KubeRay's probes call wget. tini passes signals on, to the command alone: it stops its Ray in order (6 s), and with the
# whole group told (`-g`) it would ask half a minute for a Ray that is gone, of which `docker stop` waits for 10 s.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12 python3.12-dev g++ ninja-build procps tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && (userdel --remove ubuntu 2>/dev/null || true) \
    && groupadd --gid 1000 ray && useradd --uid 1000 --gid 1000 --create-home ray
COPY --from=install-cuda /opt/flotilla /opt/flotilla
ENV PATH=/opt/flotilla/bin:$PATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 FLOTILLA_CACHE=/tmp/flotilla FLASHINFER_WORKSPACE_BASE=/tmp/flashinfer \
    TRITON_CACHE_DIR=/tmp/triton
USER 1000:1000
WORKDIR /home/ray
ENTRYPOINT ["tini", "--"]
CMD ["flotilla", "serve", "--help"]

FROM ${PYTHON_IMAGE} AS cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends procps tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 ray && useradd --uid 1000 --gid 1000 --create-home ray
COPY --from=install-cpu /opt/flotilla /opt/flotilla
ENV PATH=/opt/flotilla/bin:$PATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 FLOTILLA_CACHE=/tmp/flotilla
USER 1000:1000
WORKDIR /home/ray
ENTRYPOINT ["tini", "--"]
CMD ["flotilla", "serve", "--help"]
