# escape=`
# check: test $(wc -l < /lines) = 3
# needs: run
FROM debian
RUN echo one > /lines && `
    # between

    echo two >> /lines; `
    echo 'th\ree' >> /lines
