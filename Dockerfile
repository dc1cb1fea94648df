# Build:  docker build -t groundup .          (podman build and buildah build take the same)
# Test:   docker build -t groundup-test --target=test . && docker run --rm groundup-test
# Run and serve: docs/running.md, "In a container".
#
# BASE is an image with Python 3.11 or newer and apt. PIP_ARGS are given to pip: PyPI's torch runs on
# NVIDIA GPUs and on CPUs, that of --extra-index-url=https://download.pytorch.org/whl/cpu on CPUs
# alone, in less space.
ARG BASE=python:3.11-slim-bookworm

# The packages, in a virtual environment that the next stage copies without pip's caches.
FROM ${BASE} AS packages
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
RUN python3 -c 'import ensurepip' || apt-get install -y python3-venv
RUN python3 -m venv /opt/venv
COPY requirements.txt requirements-serve.txt /tmp/
ARG PIP_ARGS=
RUN /opt/venv/bin/pip install --no-cache-dir ${PIP_ARGS} -r /tmp/requirements.txt \
    -r /tmp/requirements-serve.txt

# A compiler and Python.h stay: torch.compile and groundup/kernels build their code when it first runs.
FROM ${BASE} AS runtime
RUN apt-get update && apt-get install -y --no-install-recommends g++ libc6-dev make \
    && { test -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
    || apt-get install -y python3-dev; } && rm -rf /var/lib/apt/lists/*
COPY --from=packages /opt/venv /opt/venv
ENV VENV=/opt/venv PATH=/opt/venv/bin:$PATH LANG=C.UTF-8 PYTHONUNBUFFERED=1
WORKDIR /groundup
COPY . .
# For make: these are installed.
RUN touch /opt/venv/core /opt/venv/serve

# With the packages that the tests compare with.
FROM runtime AS test
RUN apt-get update && apt-get install -y --no-install-recommends git
RUN pip install --no-cache-dir -r requirements-test.txt && touch /opt/venv/tests
CMD ["make", "quick"]

FROM runtime
CMD ["python", "pretrain.py", "config/debug.py"]
