# rlcore on CPUs: the Transformers backend, the environments and the command, installed as `make quickstart` installs them.
# Not run on this hardware: no Docker engine was available, so no image has been built from this file yet.
#
#   docker build --tag rlcore .
#   docker run --rm --shm-size 2g --volume "$PWD":/work rlcore train config.yaml
#
# More packages, here what KubeRay and vLLM on GPUs need (docs/clusters.md); torch of PyPI is a build for CUDA:
#   docker build --build-arg PACKAGES="ray[default] ./rl_backends_vllm[cuda]" --tag rlcore-gpu .
#
# --shm-size: Ray keeps its object store in /dev/shm, of which Docker gives a container only 64 MiB by default.

FROM python:3.11-slim

RUN apt-get update \
 && apt-get install --yes --no-install-recommends bubblewrap gcc g++ make wget \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/rlcore
COPY . .
RUN make PYTHON=python3.11 .venv/.installed
# Without constraints.txt, which has versions for CPUs that vllm for CUDA does not accept; installed versions stay where they fit.
ARG PACKAGES=""
RUN test -z "$PACKAGES" || .venv/bin/python -m pip install --no-build-isolation $PACKAGES

RUN useradd --create-home rlcore \
 && mkdir /work \
 && chown rlcore /work
USER rlcore
WORKDIR /work
ENV PATH=/opt/rlcore/.venv/bin:$PATH PYTHONUNBUFFERED=1
ENTRYPOINT ["rlcore"]
CMD ["--help"]
