# refused: the image has no user 'nobody-there'
# needs: run
FROM debian
RUN true
USER nobody-there
