# check: test $LC_ALL = C && sort words.txt | head -1 | grep -q apple
FROM debian
WORKDIR /app
COPY words.txt .
ENV LC_ALL=C
