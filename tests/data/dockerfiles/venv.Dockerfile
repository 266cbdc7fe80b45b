# check: test $(python -c 'import sys; print(sys.prefix)') = /opt/venv
# needs: run
FROM debian
RUN python3 -m venv --without-pip /opt/venv
ENV PATH=/opt/venv/bin:$PATH
