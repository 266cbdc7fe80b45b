# check: test $(python3 main.py) = 42
FROM debian
COPY . /app/
WORKDIR /app/src
CMD ["python3", "main.py"]
