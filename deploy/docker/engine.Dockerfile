# One SGLang engine with its supervisor.   Context: the repository's root.
#   CPU: docker build -f deploy/docker/engine.Dockerfile -t lagrange/engine:dev .
#   GPU: add --build-arg VARIANT=gpu --build-arg BASE_IMAGE=lmsysorg/sglang:v0.5.23
# Two environments, kept apart: /opt/lagrange (the supervisor, no torch) and /opt/sglang (the server). With VARIANT=gpu
# /opt/sglang/bin/python is the base image's own interpreter, in which SGLang is installed.
ARG BASE_IMAGE=python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS build
ARG VARIANT=cpu
ARG PIP_NO_INDEX=0
ARG PIP_FIND_LINKS=/wheels
# Where PyTorch's CPU build comes from, if the default index serves the larger CUDA build.
ARG TORCH_FIND_LINKS=/wheels
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY deploy/docker/wheels /wheels
COPY requirements/base.txt requirements/sglang.txt /src/requirements/
RUN python3 -m venv /opt/lagrange \
 && /opt/lagrange/bin/pip install -r /src/requirements/base.txt
COPY rollout/sglang_cpu_plugin /src/sglang_cpu_plugin
# SGLang pins a CUDA build of PyTorch, so on a CPU its dependencies are named by us and it is installed without them.
RUN case "${VARIANT}" in \
      cpu) python3 -m venv /opt/sglang \
           && /opt/sglang/bin/pip install --find-links "${TORCH_FIND_LINKS}" torch==2.13.0 \
           && /opt/sglang/bin/pip install -r /src/requirements/sglang.txt \
           && /opt/sglang/bin/pip install --no-deps torchvision==0.28.0 sglang==0.5.23 \
           && /opt/sglang/bin/pip install --no-deps --no-build-isolation /src/sglang_cpu_plugin ;; \
      gpu) python3 -c 'import sglang' \
           && install -d /opt/sglang/bin \
           && printf '#!/bin/sh\nexec %s "$@"\n' "$(command -v python3)" > /opt/sglang/bin/python \
           && chmod 0755 /opt/sglang/bin/python ;; \
      *) echo "VARIANT is cpu or gpu" >&2; exit 1 ;; \
    esac
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
LABEL org.opencontainers.image.title="lagrange-engine" \
      org.opencontainers.image.description="Lagrange: an SGLang engine and its supervisor" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN groupadd --gid 10001 lagrange \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin lagrange \
 && install -d -o 10001 -g 10001 /var/lib/lagrange
COPY --from=build /opt/sglang /opt/sglang
COPY --from=build /opt/lagrange /opt/lagrange
ENV PATH=/opt/lagrange/bin:/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp OMP_NUM_THREADS=1 \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false
# Above: /health then says whether the server is up, at once; generating is what the supervisor probes, once, at start.
USER 10001:10001
WORKDIR /var/lib/lagrange
STOPSIGNAL SIGTERM
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 CMD ["lagrange-probe"]
ENTRYPOINT ["lagrange"]
CMD ["engine", "--config", "/etc/lagrange/config.yaml"]
