# check: /usr/games/cowsay hello | grep -q hello
# needs: run network root debian-12
FROM debian:12
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends cowsay time
WORKDIR /app
