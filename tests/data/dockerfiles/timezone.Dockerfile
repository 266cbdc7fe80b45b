# check: date +%Z | grep -q UTC && grep -q UTC /etc/timezone
# needs: run
FROM debian
ENV TZ=UTC LANG=C.UTF-8
RUN ln -snf /usr/share/zoneinfo/$TZ /etc/localtime && echo $TZ > /etc/timezone
