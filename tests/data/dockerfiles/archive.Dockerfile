# check: test $(python3 /out/src/main.py) = 42
# needs: run
FROM debian
COPY src /tmp/src
RUN tar -C /tmp -czf /tmp/src.tar.gz src && mkdir /out && tar -C /out -xzf /tmp/src.tar.gz && rm -r /tmp/src
