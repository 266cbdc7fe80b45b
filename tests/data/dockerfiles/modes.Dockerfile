# check: test -e /usr/bin/mine && test $(stat -c %a /usr/local/bin/setup) = 600
# needs: run
FROM debian
COPY --chmod=750 setup.sh /usr/local/bin/setup
RUN test -x /usr/local/bin/setup && chmod 600 /usr/local/bin/setup && touch /bin/mine
