# The trainer: Megatron-core on PyTorch.   Context: the repository's root.
#   CPU: docker build -f deploy/docker/trainer.Dockerfile -t lagrange/trainer:dev .
#   GPU: add --build-arg VARIANT=gpu --build-arg BASE_IMAGE=<an image with CUDA PyTorch and Transformer Engine>
#   Ray: add --build-arg RAY=1 (trainer.launcher: ray)
# VARIANT=gpu takes PyTorch (and Transformer Engine) from the base image, and protobuf, which its packages are built for;
# VARIANT=cpu installs them.
ARG BASE_IMAGE=python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS build
ARG VARIANT=cpu
ARG RAY=0
ARG PIP_NO_INDEX=0
ARG PIP_FIND_LINKS=/wheels
# Where PyTorch's CPU build comes from, if the default index serves the larger CUDA build.
ARG TORCH_FIND_LINKS=/wheels
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY deploy/docker/wheels /wheels
COPY requirements/base.txt requirements/trainer.txt requirements/traces.txt /src/requirements/
# Megatron-core's metadata asks for Python 3.12 although its wheel works on 3.11; the flag must not reach other packages.
RUN case "${VARIANT}" in \
      cpu) python3 -m venv /opt/lagrange \
           && /opt/lagrange/bin/pip install --find-links "${TORCH_FIND_LINKS}" torch==2.13.0 \
           && /opt/lagrange/bin/pip install -r /src/requirements/base.txt -r /src/requirements/trainer.txt \
              -r /src/requirements/traces.txt ;; \
      gpu) python3 -m venv --system-site-packages /opt/lagrange \
           && grep -viE '^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)[=<>~]' /src/requirements/trainer.txt > /src/requirements/trainer-gpu.txt \
           && grep '^opentelemetry-' /src/requirements/traces.txt > /src/requirements/traces-gpu.txt \
           && /opt/lagrange/bin/pip install -r /src/requirements/base.txt -r /src/requirements/trainer-gpu.txt \
              -r /src/requirements/traces-gpu.txt ;; \
      *) echo "VARIANT is cpu or gpu" >&2; exit 1 ;; \
    esac \
 && /opt/lagrange/bin/pip install --no-deps --ignore-requires-python megatron-core==0.19.2 \
 && if [ "${RAY}" = 1 ]; then /opt/lagrange/bin/pip install ray==2.60.0; fi
COPY pyproject.toml README.md LICENSE /src/
COPY configs /src/configs
COPY broker /src/broker
COPY rollout /src/rollout
COPY trainer /src/trainer
COPY services /src/services
RUN /opt/lagrange/bin/pip install --no-deps --no-build-isolation /src
COPY deploy/docker/probe.py /opt/lagrange/bin/lagrange-probe
RUN chmod 0755 /opt/lagrange/bin/lagrange-probe

# hadolint ignore=DL3006
FROM ${BASE_IMAGE}
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="lagrange-trainer" \
      org.opencontainers.image.description="Lagrange: the Megatron-core trainer" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN groupadd --gid 10001 lagrange \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin lagrange \
 && install -d -o 10001 -g 10001 /var/lib/lagrange
COPY --from=build /opt/lagrange /opt/lagrange
ENV PATH=/opt/lagrange/bin:/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp OMP_NUM_THREADS=1 \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /var/lib/lagrange
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["lagrange-probe"]
ENTRYPOINT ["lagrange"]
CMD ["trainer", "--config", "/etc/lagrange/config.yaml"]
