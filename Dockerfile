# The stages run the scripts that a developer runs.
#   docker build --target test .                         every test
#   docker build --target scheduler -t h3-scheduler .    no LibTorch, no CUDA
#   docker build --target worker -t h3-worker .          LibTorch; the wheel from PyPI brings its CUDA libraries
#   docker build --target client -t h3ctl .

FROM debian:bookworm AS build
WORKDIR /src
COPY scripts scripts
RUN scripts/setup.sh
COPY . .
RUN scripts/build.sh release h3-scheduler h3-worker h3ctl

FROM build AS test
RUN ./test.sh

# LibTorch's libraries alone, and CUDA's where the wheel has them, at the paths that the programs were linked to.
FROM build AS libtorch
RUN set -e; site=$(realpath .deps/libtorch/..); mkdir /libs; cp -a --parents /src/.deps/libtorch "$site/torch/lib" /libs; \
    if [ -d "$site/nvidia" ]; then cp -a --parents "$site/nvidia" /libs; fi

# What the programs link, without headers and compilers.
FROM debian:bookworm-slim AS runtime
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates libabsl20220623 libgrpc++1.51 libprometheus-cpp-pull1.0 libprotobuf32 libre2-9 libspdlog1.10 libssl3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 65532 --no-create-home h3
USER 65532

FROM runtime AS scheduler
COPY --from=build /src/build/release/bin/h3-scheduler /usr/local/bin/
EXPOSE 50051 9464
ENTRYPOINT ["h3-scheduler", "--listen", "0.0.0.0:50051", "--metrics", "0.0.0.0:9464"]

# Holds both programs: with --entrypoint h3-scheduler and --model it serves alone.
FROM runtime AS worker
COPY --from=libtorch /libs/ /
COPY --from=build /src/build/release/bin/h3-scheduler /src/build/release/bin/h3-worker /usr/local/bin/
EXPOSE 50052 9465
ENTRYPOINT ["h3-worker", "--listen", "0.0.0.0:50052", "--metrics", "0.0.0.0:9465"]

FROM runtime AS client
COPY --from=build /src/build/release/bin/h3ctl /usr/local/bin/
ENTRYPOINT ["h3ctl"]
