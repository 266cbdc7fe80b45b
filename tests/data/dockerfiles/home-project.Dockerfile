# check: test -e words.txt && . /root/.profile && test $GREETING = hello
# needs: run
FROM debian
WORKDIR /root/project
COPY words.txt .
RUN echo 'export GREETING=hello' >> /root/.profile
