# refused: :2: `FROM ubuntu:18.04` is ubuntu 18.04, and this machine
FROM ubuntu:18.04
