# refused: :5: `RUN echo first .*it ended with code 7: first\nwhy
# needs: run
FROM debian
WORKDIR /app
RUN echo first && \
  echo why >&2 && exit 7
