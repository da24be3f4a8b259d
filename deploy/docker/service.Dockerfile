# The services that need no GPU and no torch: users, init, weight-sync, monitor, rollout.   Context: the repository's root.
#   docker build -f deploy/docker/service.Dockerfile -t lagrange/service:dev .
# Without a network: put wheels into deploy/docker/wheels and add --build-arg PIP_NO_INDEX=1 (docs/deploy/images.md).
ARG BASE_IMAGE=python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS build
ARG PIP_NO_INDEX=0
ARG PIP_FIND_LINKS=/wheels
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY deploy/docker/wheels /wheels
COPY requirements/base.txt requirements/traces.txt /src/requirements/
RUN python3 -m venv /opt/lagrange \
 && /opt/lagrange/bin/pip install -r /src/requirements/base.txt -r /src/requirements/traces.txt
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
LABEL org.opencontainers.image.title="lagrange-service" \
      org.opencontainers.image.description="Lagrange: rollout workers, weight-sync and monitor" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN groupadd --gid 10001 lagrange \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin lagrange \
 && install -d -o 10001 -g 10001 /var/lib/lagrange /var/lib/lagrange-users
COPY --from=build /opt/lagrange /opt/lagrange
ENV PATH=/opt/lagrange/bin:/usr/local/bin:/usr/bin:/bin HOME=/tmp OMP_NUM_THREADS=1 \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /var/lib/lagrange
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 CMD ["lagrange-probe"]
ENTRYPOINT ["lagrange"]
CMD ["--help"]
