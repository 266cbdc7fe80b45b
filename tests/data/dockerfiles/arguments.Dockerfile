# check: test "$(cat /opt/v3/made)" = '3 v3' && test $FROM_ARG = debian && test -z "$VERSION"
# needs: run
ARG BASE=debian
FROM ${BASE}
ARG VERSION=3
ARG BASE
ENV RELEASE=v${VERSION} FROM_ARG=$BASE
LABEL org.example.version=$RELEASE
WORKDIR /opt/$RELEASE
RUN echo "$VERSION $RELEASE" > made
