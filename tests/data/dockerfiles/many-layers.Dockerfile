# check: cat /n0 /n11
# needs: run
FROM debian
RUN echo 0 > /n0
RUN echo 1 > /n1
RUN echo 2 > /n2
RUN echo 3 > /n3
RUN echo 4 > /n4
RUN echo 5 > /n5
RUN echo 6 > /n6
RUN echo 7 > /n7
RUN echo 8 > /n8
RUN echo 9 > /n9
RUN echo 10 > /n10
RUN echo 11 > /n11
