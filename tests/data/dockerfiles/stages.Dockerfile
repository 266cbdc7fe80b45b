# check: test "$(cat /app/bin/tool)" = built-in-bookworm && test ! -e /work -a ! -e /never && test "$GREETING" = hello && test "$(ls /app/data)" = "$(printf 'one.txt\ntwo.txt')" && test "$(stat -c %a /app/bin/tool)" = 750 && test "$(cat /app/link)" = built-in-bookworm && test "$(pwd)" = /app
# needs: run
ARG RELEASE=bookworm
FROM debian:${RELEASE} AS base
ENV GREETING=hello
WORKDIR /app
FROM scratch-that-nobody-needs AS tests
RUN touch /never
FROM base AS Builder
ARG RELEASE
RUN mkdir -p /work/data /work/bin && echo built-in-$RELEASE > /work/bin/tool && chmod 750 /work/bin/tool && ln -s bin/tool /work/link
RUN for each in one two; do echo $each > /work/data/$each.txt; done; rm /work/data/two.txt && echo 2 > /work/data/two.txt && touch /work/data/no.log
FROM base
COPY --from=builder /work/bin/ /app/bin/
COPY --from=2 /work/data/*.txt data/
COPY --from=builder /work/link .
