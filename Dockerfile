# Images of Tandem: `docker build --target cpu .` and `docker build --target cuda .`; see docs/deploy.md.
#
# tools/check_container.py runs these steps in a Debian tree without a container runtime. It knows the instructions
# that are used here, in the exec form where there are two.

FROM debian:12.12-slim AS python
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 \
 && rm -rf /var/lib/apt/lists/*

FROM python AS packages
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/tandem
RUN python3 -m venv .venv
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY requirements.txt requirements-cluster.txt ./

FROM packages AS packages-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN .venv/bin/python -m pip install torch==2.13.0 --index-url "$TORCH_INDEX"
RUN .venv/bin/python -m pip install -r requirements.txt -r requirements-cluster.txt

# PyTorch's default build for Linux contains CUDA; the driver is that of the host. === excludes builds for CPUs.
FROM packages AS packages-cuda
RUN .venv/bin/python -m pip install torch===2.13.0
COPY requirements-gpu.txt ./
RUN .venv/bin/python -m pip install -r requirements.txt -r requirements-cluster.txt -r requirements-gpu.txt

FROM python AS app
RUN useradd --system --uid 10001 --home-dir /opt/tandem/Cache/home --no-create-home --shell /usr/sbin/nologin tandem
WORKDIR /opt/tandem
COPY app.py LICENSE ./
COPY frontend_assets frontend_assets
COPY examples examples
COPY runtime runtime
RUN python3 -m compileall -q app.py runtime
RUN install --directory --owner=tandem --group=tandem --mode=0700 Cache
ENV HOME=/opt/tandem/Cache/home \
    PATH=/opt/tandem/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    TANDEM_BROWSER=false \
    TANDEM_PORT=7860
VOLUME /opt/tandem/Cache
EXPOSE 7860
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7860/healthz', timeout=4)"]
ENTRYPOINT ["python", "/opt/tandem/app.py"]
# The web app with the API beside it. It needs TANDEM_AUTH, since other machines can reach it.
CMD ["--host", "0.0.0.0"]

# A compiler for Triton and Inductor, which compile blocks of the transformer.
FROM app AS cuda
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ python3-dev \
 && rm -rf /var/lib/apt/lists/*
COPY --from=packages-cuda /opt/tandem/.venv .venv
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER tandem

FROM app AS cpu
COPY --from=packages-cpu /opt/tandem/.venv .venv
USER tandem
