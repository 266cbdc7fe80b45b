# check: test "$(ls src)" = new && ! test -e words.txt && ! command -v whoami && printf '1\n2\n' | cat-reversed | head -1 | grep -q 2
# needs: run
FROM debian
WORKDIR /app
COPY . .
RUN rm -rf src words.txt && mkdir src && echo new > src/new
RUN rm /usr/bin/whoami && mv /usr/bin/tac /usr/bin/cat-reversed
