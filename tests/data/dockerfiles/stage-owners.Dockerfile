# check: test "$(stat -c %u /srv/a/mine /srv/mine /srv/given)" = "$(printf '1234\n1234\n77')"
# needs: run root
FROM debian AS build
RUN useradd -m -u 1234 sailor && mkdir /out && echo 1 > /out/mine && chown -R sailor /out
FROM debian
COPY --from=build /out /srv/a
COPY --from=build /out/mine /srv/mine
COPY --from=build --chown=77 /out/mine /srv/given
