# check: grep -q 1500 uid && grep -q made made && ! test -e /etc/mine
# needs: run root
FROM debian
RUN mkdir /place && chown 1500:1500 /place
USER 1500:1500
WORKDIR /place
RUN id -u > uid; echo made > /place/made; ! touch /etc/mine
