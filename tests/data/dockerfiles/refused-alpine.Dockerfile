# refused: :2: `FROM alpine:3.20` cannot be built here
FROM alpine:3.20
RUN apk add git
