# refused: :4: several stages cannot be built here
FROM debian AS build
LABEL a=b
FROM debian
COPY --from=build /a /a
