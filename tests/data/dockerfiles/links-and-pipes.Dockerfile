# check: test -L /link && grep -q root /hard && test -p /pipe && test -e /link-target
# needs: run
FROM debian
RUN ln -s /etc/hostname /link && ln /etc/passwd /hard && mkfifo /pipe && chmod 4755 /hard
COPY words.txt /tmp/../link-target
