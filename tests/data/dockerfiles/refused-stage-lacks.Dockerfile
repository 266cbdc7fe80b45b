# refused: :5: `COPY --from=build .*there is no /nowhere in that stage
# needs: run
FROM debian AS build
FROM debian
COPY --from=build /nowhere /a
