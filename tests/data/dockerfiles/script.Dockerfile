# check: grep -q ready ready && ! test -e /tmp/setup.sh
# needs: run
FROM debian
WORKDIR /app
COPY setup.sh /tmp/setup.sh
RUN chmod +x /tmp/setup.sh \
    # what was copied is run
    && /tmp/setup.sh \
    && rm /tmp/setup.sh
