# refused: :3: `--from=alpine` names no stage above
FROM debian
COPY --from=alpine /a /a
