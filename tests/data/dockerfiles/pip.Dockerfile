# check: python -c 'import six; print(six.__version__)'
# needs: run network root python debian-12
FROM python:3.11-slim-bookworm
WORKDIR /app
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
