# check: git log --oneline | grep -q first && test -z "$(git status --porcelain)"
# needs: run
FROM debian
WORKDIR /repo
COPY src/ .
RUN git init -q . && git config user.email a@example.com && git config user.name a \
 && git add -A && git commit -qm first && git config --system safe.directory '*'
