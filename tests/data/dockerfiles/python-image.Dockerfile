# check: grep -q 42 value && python -c 'import pkg'
# needs: run python
FROM python:3-slim
WORKDIR /app
COPY src/ ./
RUN python -c "import pkg; print(pkg.VALUE)" > value && pip --version
