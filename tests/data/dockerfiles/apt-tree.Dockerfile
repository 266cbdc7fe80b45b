# check: tree --version
# needs: run network root
FROM debian
RUN apt-get update && apt-get install -y --no-install-recommends \
    tree \
    && rm -rf /var/lib/apt/lists/*
